"""Stand-ins: affine maps of small rank that replace experts for dropped assignments."""
