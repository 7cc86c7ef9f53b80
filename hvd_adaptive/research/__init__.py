"""What comparisons need and users seldom do: SMA and logical ranks."""
