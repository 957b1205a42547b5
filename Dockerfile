# gptworks on CPUs. Without a command it serves the model that is mounted at /model.
#   docker build -t gptworks .
#   docker run -p 127.0.0.1:8000:8000 -v ./runs/stories:/model:ro gptworks
#   gptworks launch --image gptworks -- gptworks train -c recipes/quickstart.yaml
FROM python:3.12-slim

# The C++ kernel of generation is compiled at its first use.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/gptworks
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ".[serve]"

# Folders are mounted under the names they have outside, by whoever starts it: no user of its own.
WORKDIR /work
ENTRYPOINT []
# Inside of the container every address is the container's own; -p says who reaches it.
CMD ["gptworks", "serve", "--model", "/model", "--host", "0.0.0.0", "--open"]
