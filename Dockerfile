# gptworks on CPUs.
#   docker build -t gptworks .
#   gptworks launch --image gptworks -- gptworks train -c recipes/quickstart.yaml
FROM python:3.12-slim

# The C++ kernel of generation is compiled at its first use.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/gptworks
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir .

# Folders are mounted under the names they have outside, by whoever starts it: no user of its own.
WORKDIR /work
ENTRYPOINT []
CMD ["gptworks", "--help"]
