"""Pure rules of elastic training: membership, generations, the ledger and the order of samples."""
