"""Quality with and without a policy, on the same samples."""
