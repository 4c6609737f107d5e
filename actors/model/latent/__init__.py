"""Multi-head latent attention (MLA): its layer, and its naive and absorbed forms."""
