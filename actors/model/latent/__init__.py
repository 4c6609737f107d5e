"""Multi-head latent attention (`placement.mla_spec`): its layer, and its two forms over any kernel."""
