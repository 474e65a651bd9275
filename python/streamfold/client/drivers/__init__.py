"""What carries requests to engines and their replies to the parser: one Driver for each kind of transport."""
