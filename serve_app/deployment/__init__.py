"""What is to be deployed: settings, pools, the model's files, checked before anything starts."""
