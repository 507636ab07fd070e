"""One reader per node: the dataloader's place. It will come as docs/design/architecture.md draws it."""
