"""The OpenAI endpoint as a FastAPI application."""
