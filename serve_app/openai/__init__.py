"""The OpenAI-shaped HTTP endpoint, over any `serve_app.routing.backend.Backend`."""
