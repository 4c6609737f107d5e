"""Which tokens run next: the scheduler, and the loop that sends its plans to the ranks."""
