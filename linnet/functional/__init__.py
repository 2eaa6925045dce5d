"""The maths: arrays in, arrays out, each computation written once."""
