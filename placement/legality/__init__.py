"""Layout validation: the rules of a legal layout, checked all at once, and the nearest legal alternatives."""
