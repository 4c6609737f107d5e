"""One rank at work: it takes step plans, runs its part of the model, and answers."""
