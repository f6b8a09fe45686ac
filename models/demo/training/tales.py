"""Short children's stories from our own grammar.

They teach a tiny model what real text of this size cannot: a story about the requested subject with
a beginning, a problem and an end. `data.py` mixes in real stories.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ANIMALS = (
    "dog cat rabbit fox bear mouse pig horse cow goat sheep duck hen owl frog turtle squirrel "
    "elephant lion tiger monkey giraffe zebra kangaroo penguin hedgehog wolf deer donkey crow "
    "dragon parrot snail bee ant butterfly whale dolphin fish octopus crab camel panda koala "
    "kitten puppy bird lizard beaver badger swan goose spider unicorn dinosaur"
).split()
SHE = ("girl", "princess", "queen", "fairy", "mermaid", "grandmother", "witch")
HE = ("boy", "prince", "king", "wizard", "grandfather", "pirate", "knight", "giant")
THEY = (
    "farmer", "fisherman", "baker", "painter", "sailor", "gardener", "teacher", "robot",
    "shepherd", "tailor", "clown", "astronaut", "musician", "cloud", "star", "tree",
    "snowman", "toy", "train", "boat", "car", "ghost", "monster", "kite", "river",
)  # fmt: skip
GIRLS = (
    "Lily Mia Anna Ella Zoe Nora Ruby Ivy Luna Rosa Tara Maya Daisy Molly Penny Poppy Clara "
    "Hazel Nina Sara Amy Lucy Kira Tilda Greta"
).split()
BOYS = (
    "Tim Tom Ben Max Leo Sam Finn Oscar Hugo Milo Jack Otto Theo Toby Felix Charlie Ravi Omar "
    "Pip Bruno Rufus Barney Kofi Nico Emil"
).split()
PLACES = (
    "in a quiet forest", "near a big lake", "on a green hill", "by the sea", "in a small village",
    "at the edge of a garden", "in a cozy little house", "under an old oak tree", "on a farm",
    "beside a river", "in a sunny valley", "on a little island", "in a busy town",
    "near a tall mountain", "in a wide meadow",
)  # fmt: skip
TRAITS = (
    "curious", "kind", "shy", "brave", "cheerful", "clever", "gentle", "lonely", "playful",
    "sleepy", "proud", "busy", "tiny", "friendly", "hungry", "silly",
)  # fmt: skip
THINGS = (
    "red ball", "blue kite", "shiny key", "golden bell", "little boat", "warm scarf", "wooden box",
    "round stone", "silver spoon", "paper star", "green hat", "music box", "picture book",
    "small lantern", "yellow umbrella", "soft blanket", "honey cake", "big drum",
)  # fmt: skip
FOODS = (
    "apples", "berries", "warm bread", "carrots", "honey", "soup", "pancakes", "nuts", "cookies",
    "pears", "cheese", "cherries",
)  # fmt: skip
LESSONS = {
    "share": ("Sharing makes everyone happy.", "Good things are better when you share them."),
    "help": ("A small act of kindness can help a lot.", "Helping others feels good."),
    "brave": ("Being brave means trying even when you are afraid.", "Even the small can be brave."),
    "truth": ("It is always best to tell the truth.", "An honest friend is a good friend."),
    "patience": ("Good things take time.", "With patience, hard things become easy."),
    "friend": ("A new friend can be found in any place.", "A good friend makes every day bright."),
    "self": ("It is good to be just who you are.", "Everyone is special in their own way."),
    "home": ("Home is the best place to be.", "However far you go, home is waiting."),
}


@dataclass(frozen=True)
class Hero:
    """The hero of a story: kind (such as "fox"), name, and pronouns."""

    kind: str
    name: str
    they: str
    them: str
    their: str

    @property
    def They(self) -> str:
        return self.they.capitalize()


def article(noun: str) -> str:
    return "an" if noun[0].lower() in "aeiou" and not noun.startswith("uni") else "a"


def make_hero(rng: random.Random, kind: str) -> Hero:
    """Return a hero of the given kind (such as "fox"), with a random name and its pronouns."""
    female = kind in SHE or (kind not in HE and rng.random() < 0.5)
    if female:
        return Hero(kind, rng.choice(GIRLS), "she", "her", "her")
    return Hero(kind, rng.choice(BOYS), "he", "him", "his")


def _opening(r: random.Random, h: Hero, trait: str, place: str) -> str:
    who = f"{article(trait)} {trait} {h.kind}"
    return r.choice((
        f"Once upon a time, {who} named {h.name} lived {place}.",
        f"Once there was {who} called {h.name}. {h.They} lived {place}.",
        f"There was once {who} named {h.name} who lived {place}.",
        f"Long ago, {place}, there lived {who}. {h.They} was called {h.name}.",
    ))  # fmt: skip


def _lost_thing(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    thing = r.choice(THINGS)
    return (
        r.choice((
            f"{h.name} had a {thing} and took it everywhere. "
            f"One morning the {thing} was gone.",
            f"More than anything, {h.name} loved {h.their} {thing}. "
            f"But one windy day it was lost.",
        )),
        r.choice((
            f"{h.name} looked under the bed, behind the door and in the grass, but it was not "
            f"there. {h.They} felt very sad and began to cry.",
            f"{h.name} searched all day long. \"Where can it be?\" {h.they} asked, close to tears.",
        )),
        r.choice((
            f"Then {f.name} the {f.kind} came by. \"Do not worry,\" said {f.name}. \"I will help "
            f"you look.\" Together they searched high and low, and at last {f.name} found the "
            f"{thing} under a bush.",
            f"A {f.kind} named {f.name} heard {h.them}. \"I saw a {thing} near the old well,\" said"
            f" {f.name}. They ran there together, and there it was, safe and sound.",
        )),
        "help",
    )  # fmt: skip


def _share_food(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    food = r.choice(FOODS)
    return (
        f"One day {h.name} found a big basket of {food}. \"All of this is for me!\" {h.they} said.",
        r.choice((
            f"Just then {f.name} the {f.kind} walked past. {f.name} had not eaten all day and "
            f"looked at the basket with big eyes.",
            f"Soon a {f.kind} called {f.name} came along. \"I am so hungry,\" said {f.name}. "
            f"\"May I have a little?\"",
        )),
        r.choice((
            f"{h.name} thought about it. Then {h.they} smiled and gave {f.name} half of the {food}."
            f" They sat in the sun, ate together, and told each other funny stories.",
            f"At first {h.name} wanted to say no. But {h.they} saw how thin {f.name} was, and "
            f"shared the {food}. Everything tasted better with a friend.",
        )),
        "share",
    )  # fmt: skip


def _afraid(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    fear, deed = r.choice((
        ("the dark", "walk through the dark night to fetch the doctor"),
        ("deep water", "cross the cold stream to reach {f}"),
        ("loud storms", "go out into the storm to bring {f} home"),
        ("high places", "climb the tall tree to bring {f} down"),
    ))  # fmt: skip
    deed = deed.format(f=f.name)
    return (
        f"{h.name} was afraid of {fear}. The others laughed, and {h.name} stayed at home.",
        f"One evening {h.name} heard a cry. It was {f.name} the {f.kind}, who needed help.",
        r.choice((
            f"{h.name}'s legs were shaking, but {h.they} took a deep breath. {h.They} had to "
            f"{deed}. Step by step, {h.they} did it. \"You saved me!\" said {f.name}.",
            f"\"I must {deed},\" said {h.name}. {h.They} counted to three and went. It was hard, "
            f"but {h.they} did not stop. After that, nobody laughed at {h.name} again.",
        )),
        "brave",
    )  # fmt: skip


def _broken(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    thing = r.choice(("blue vase", "window", "clay pot", "toy boat", "old clock", "teacup"))
    return (
        f"One afternoon {h.name} was playing and broke {f.name}'s {thing}. Crash!",
        r.choice(
            (
                f'{h.name} wanted to hide the pieces. "If I say nothing, nobody will know," '
                f"{h.they} thought. But {h.their} tummy hurt, and {h.they} could not sleep.",
                f"{h.name} ran away and hid. All day long {h.they} thought of the broken {thing} "
                f"and felt worse and worse.",
            )
        ),
        f'In the morning {h.name} went to {f.name} the {f.kind}. "It was me. I am sorry," '
        f'{h.they} said. {f.name} was quiet for a moment and then smiled. "Thank you for telling '
        f'me. Let us fix it together."',
        "truth",
    )


def _slow_work(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    seed, result = r.choice((
        ("a tiny seed", "a tall sunflower"), ("an apple seed", "a small apple tree"),
        ("a brown bulb", "a red tulip"), ("a bean", "a long green bean plant"),
    ))  # fmt: skip
    return (
        f"In spring {h.name} planted {seed}. Every morning {h.they} looked at the ground, but there"
        f" was nothing to see.",
        f'"It will never grow!" said {h.name}. {f.name} the {f.kind} laughed softly. "Give it '
        f'water, give it sun, and wait," {f.they} said.',
        f"So {h.name} gave it water every day and waited. It rained, and the sun shone. Then one "
        f"morning there was a little green leaf, and by summer it was {result}. {h.name} danced "
        f"with joy.",
        "patience",
    )


def _lonely(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    game = r.choice(("hide and seek", "catch", "tag", "a singing game", "pirates"))
    return (
        f"{h.name} had nobody to play with. Every day {h.they} sat alone and watched the clouds.",
        f"One day {f.name} the {f.kind} moved in next door. {h.name} wanted to say hello, but "
        f"{h.they} was too shy.",
        r.choice((
            f"Then {f.name} waved. \"Do you want to play {game}?\" {h.name} nodded. They played "
            f"until the stars came out, and {h.name} was never lonely again.",
            f"{h.name} took a deep breath and said, \"Hi, I am {h.name}.\" {f.name} smiled. \"I was"
            f" hoping to find a friend!\" They played {game} all afternoon.",
        )),
        "friend",
    )  # fmt: skip


def _different(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    odd = r.choice(("too small", "too slow", "too quiet", "too loud", "too tall"))
    good = {
        "too small": "crawl through the little hole and open the door from inside",
        "too slow": "notice the right path, because {they} looked at every stone",
        "too quiet": "hear the tiny voice that was calling for help",
        "too loud": "shout so that everyone could hear and come to help",
        "too tall": "reach the branch where everybody's kite was stuck",
    }[odd].format(they=h.they)
    return (
        f'The others said that {h.name} was {odd}. "I wish I were different," {h.they} sighed.',
        f"One day there was trouble. {f.name} the {f.kind} and all the others did not know what to"
        f" do.",
        f'Only {h.name} could {good}. "Hooray for {h.name}!" cried {f.name}. From that day on, '
        f"{h.name} was happy to be just as {h.they} was.",
        "self",
    )


def _journey(r: random.Random, h: Hero, f: Hero) -> tuple[str, str, str, str]:
    goal = r.choice((
        "where the rainbow ends", "what is behind the mountain", "where the river goes",
        "how big the world is", "where the moon sleeps",
    ))  # fmt: skip
    return (
        f"{h.name} always wanted to know {goal}. So one morning {h.they} packed some "
        f"{r.choice(FOODS)} and set off.",
        f"{h.They} walked and walked. On the way {h.they} met {f.name} the {f.kind}, who came "
        f"along. They saw deep woods, bright flowers and a thousand stars.",
        f'But at night {h.name} thought of {h.their} own bed. "I have seen so much," {h.they} '
        f'said. "Now I want to go home." When {h.they} came back, everyone was waiting with a '
        f"warm supper, and {h.name} told them all about it.",
        "home",
    )


PLOTS = (
    _lost_thing, _share_food, _afraid, _broken, _slow_work, _lonely, _different, _journey,
)  # fmt: skip


def subjects() -> list[str]:
    """Return every kind of hero (such as "fox") that a story can be about."""
    return [*ANIMALS, *SHE, *HE, *THEY]


def tale(rng: random.Random, kind: str | None = None) -> tuple[str, Hero]:
    """Generate a story, and return it with its hero.

    `kind` is the kind of hero, such as "fox". None chooses a random kind.
    """
    hero = make_hero(rng, kind or rng.choice(subjects()))
    friend = make_hero(rng, rng.choice(ANIMALS))
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = make_hero(rng, rng.choice(ANIMALS))
    parts = rng.choice(PLOTS)(rng, hero, friend)
    opening = _opening(rng, hero, rng.choice(TRAITS), rng.choice(PLACES))
    end = rng.choice(("", "", rng.choice(LESSONS[parts[3]]), "The end."))
    text = f"{opening} {parts[0]}\n\n{parts[1]}\n\n{parts[2]}"
    return (f"{text}\n\n{end}" if end else text), hero
