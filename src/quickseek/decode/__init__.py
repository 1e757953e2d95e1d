"""The specialized decode: small decode batches run the stock layers' modules in a faster schedule."""
