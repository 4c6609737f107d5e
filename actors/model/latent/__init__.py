"""Multi-head latent attention (`placement.model.mla_spec`): its layer, and its two forms over any kernel."""
