"""Who owns which slice of the weights, which KV block and which token, under any layout."""
