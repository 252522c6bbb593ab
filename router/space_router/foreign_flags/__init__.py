"""Other engines' flags and variables: what each is here, from one table."""
