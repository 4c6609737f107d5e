"""HTTP answers of the OpenAI endpoint, whole and streamed."""
