"""A job from the outside: stage servers, the group's birth and end, what the driver reports."""
