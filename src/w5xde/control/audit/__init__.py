"""The audit: counts again, from the ledger alone, that every batch was applied exactly once."""
