"""Models over HTTP, in the words of OpenAI's API: `gptworks serve`."""
