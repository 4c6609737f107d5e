"""One replica on Ray: its placement group, its rank actors, its engine, and its supervision."""
