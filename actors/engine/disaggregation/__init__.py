"""What an engine awaits from other engines and from KV tiers, beside its own steps."""
