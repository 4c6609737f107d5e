"""The engine's KV connector: prefill/decode disaggregation (KV transfer) and KV offload."""
