"""KV cache from rank to rank of unlike layouts: the KV connector of prefill/decode disaggregation."""
