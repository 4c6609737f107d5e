"""Context parallelism (CP, DCP): attention over a sequence whose keys lie on several ranks."""
