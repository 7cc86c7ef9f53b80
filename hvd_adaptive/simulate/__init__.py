"""A described cluster in virtual time: what each strategy would make of it."""
