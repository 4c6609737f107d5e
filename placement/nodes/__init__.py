"""Machines and the links between them; which node each bundle of a replica goes to."""
