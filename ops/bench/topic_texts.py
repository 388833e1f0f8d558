"""Short texts of four topics, put together from parts written for it: who, what they did, and how it ended."""

import itertools
import random

PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "sports": (
        ("The striker", "Our goalkeeper", "The young sprinter", "A veteran coach", "The home team", "Their captain"),
        (
            "trained hard before the final match",
            "missed a penalty in the second half",
            "ran the last lap faster than anyone else",
            "was carried off the field with an injured knee",
            "celebrated the victory in front of the fans",
            "lost the championship by a single point",
        ),
        (
            "The stadium was full until the whistle.",
            "The referee had to stop the game twice.",
            "Next season they will play in a higher league.",
            "Nobody had expected such a score.",
            "The crowd cheered when the medals were handed out.",
            "The tournament goes on next Saturday.",
        ),
    ),
    "cooking": (
        ("My grandmother", "The chef", "A baker in our street", "The cook", "Her older brother", "The new restaurant"),
        (
            "fried the onions in butter until they were golden",
            "baked a cake with lemon and almonds",
            "served the soup with fresh bread",
            "added garlic and pepper to the tomato sauce",
            "roasted a chicken with potatoes and rosemary",
            "let the dough rest before rolling it out",
        ),
        (
            "The kitchen smelled wonderful all evening.",
            "A pinch of salt was all that was missing.",
            "Everybody asked for a second plate.",
            "It tastes best when it is still warm.",
            "The recipe has been in the family for years.",
            "For dessert there was ice cream with cherries.",
        ),
    ),
    "weather": (
        ("The north of the country", "The coast", "The valley", "The whole region", "The island", "The city"),
        (
            "will see heavy rain and strong wind tonight",
            "woke up under thick fog this morning",
            "had the hottest summer day in ten years",
            "is waiting for the first snow of the winter",
            "was hit by a storm with hail and lightning",
            "can expect sunshine and a clear blue sky",
        ),
        (
            "Temperatures will drop below zero at night.",
            "The clouds should move away by noon.",
            "Forecasters warn of floods along the rivers.",
            "A cold front comes in from the sea.",
            "It stays dry until the end of the week.",
            "Thunder could be heard for hours.",
        ),
    ),
    "computers": (
        ("The programmer", "An engineer", "The new laptop", "The server", "Our software team", "The administrator"),
        (
            "crashed after the last update of the operating system",
            "found a bug in the code of the database",
            "needs more memory and a faster processor",
            "lost all files because there was no backup",
            "installed a program that encrypts the hard disk",
            "was attacked by a virus over the network",
        ),
        (
            "After a restart the error message was gone.",
            "The password had to be changed at once.",
            "The new version can be downloaded today.",
            "The keyboard and the screen still work.",
            "The source files are stored in the cloud.",
            "Users could not log in to the website.",
        ),
    ),
}
LABELS = tuple(PARTS)
NUM_SHOWN_PARTS = 2  # of each column: texts to ask for have no part of a text that was shown


def shown(label: str, count: int) -> list[str]:
    """Texts of a topic to show with their label; at most eight."""
    return _made(label, [column[:NUM_SHOWN_PARTS] for column in PARTS[label]])[:count]


def asked(label: str) -> list[str]:
    """Texts of a topic to ask for: 64."""
    return _made(label, [column[NUM_SHOWN_PARTS:] for column in PARTS[label]])


def _made(label: str, columns: list[tuple[str, ...]]) -> list[str]:
    """All combinations, in an order that looks random and is always the same."""
    made = [f"{who} {did}. {end}" for who, did, end in itertools.product(*columns)]
    random.Random(label).shuffle(made)
    return made
