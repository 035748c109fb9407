"""The processes that train one model together, and how its parameters are placed on them."""
