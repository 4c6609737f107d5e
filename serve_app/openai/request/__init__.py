"""HTTP requests of the OpenAI endpoint: fields, prompts, limits and errors."""
