"""The process that computes: owns one stage, is one member of one group, is then thrown away."""
