"""The batch of a model: its columns, its collation, and the borders of packed documents."""
