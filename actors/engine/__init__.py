"""The engine: the continuous-batching scheduler, and the loop that sends its step plans to the ranks."""
