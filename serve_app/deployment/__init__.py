"""The deployment's settings, pools and model files, checked before anything starts."""
