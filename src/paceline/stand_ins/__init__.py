"""Stand-ins of experts: what a dropped assignment leaves behind, its file, and its computation."""
