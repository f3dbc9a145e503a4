"""The trainer of `tests.whole_room.light`, under a name of its own: agents and tests find trainers by it."""

from tests.whole_room.light import train

if __name__ == "__main__":
    train()
