"""The OpenAI-compatible endpoint as a FastAPI application."""
