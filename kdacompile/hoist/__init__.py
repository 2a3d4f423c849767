"""What a loop does to every token alike is taken in front of it or behind it, proven equal; put back if nothing new is
recognised.
"""
