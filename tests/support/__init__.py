"""What several test directories share: small checkpoints, and streams written by other hands than ours."""
