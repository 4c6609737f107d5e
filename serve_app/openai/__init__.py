"""The OpenAI-shaped HTTP endpoint, over any `serve_app.backend.Backend`."""
