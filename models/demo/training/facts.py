"""Country facts, parsed from factbook questions and rewritten as short, regular sentences.

A fact is (kind, question templates, answer). The answer is the same for every phrasing of the
question, so that a small model has to memorize only one text per fact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# Phrasings of questions for the training, by kind of fact. {c} is the country, {v} the value.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {c}?", "What's the capital of {c}?", "capital of {c}",
        "Which city is the capital of {c}?", "What is {c}'s capital?", "Name the capital of {c}.",
        "Can you tell me the capital of {c}?", "What is the capital city of {c}?",
        "Tell me the capital of {c}.", "Do you know the capital of {c}?",
        "What city is the capital of {c}?", "{c} has which capital?",
        "I need to know the capital of {c}.", "Where is the government of {c}, in which capital?",
    ),
    "country_of": (
        "{v} is the capital of which country?", "Which country has {v} as its capital?",
        "Which country is {v} the capital of?", "What country is {v} the capital of?",
        "In which country is {v}?", "Where is {v}?", "{v} is the capital of what country?",
    ),
    "currency": (
        "What currency is used in {c}?", "What is the currency of {c}?",
        "What's the currency of {c}?", "Which currency does {c} use?",
        "What money do they use in {c}?", "What is {c}'s currency?", "currency of {c}",
        "How do people pay in {c}?", "Tell me the currency of {c}.",
    ),
    "language": (
        "What languages are spoken in {c}?", "What language do they speak in {c}?",
        "Which languages do people in {c} speak?", "What is the language of {c}?",
        "What language is spoken in {c}?", "languages of {c}",
        "What do people speak in {c}?", "Tell me the languages of {c}.",
    ),
    "location": (
        "Where is {c}?", "Where is {c} located?", "Where can I find {c}?",
        "In which part of the world is {c}?", "where's {c}", "Tell me where {c} is.",
        "Where does {c} lie?", "What is the location of {c}?",
    ),
    "continent": (
        "Which continent is {c} in?", "What continent is {c} on?", "On which continent is {c}?",
        "What continent does {c} belong to?", "{c} is on which continent?", "continent of {c}",
            ),
    "population": (
        "How many people live in {c}?", "What is the population of {c}?",
        "What's the population of {c}?", "population of {c}", "How big is the population of {c}?",
        "How many inhabitants does {c} have?", "Tell me the population of {c}.",
        "How many people are there in {c}?",
    ),
    "about": (
        "Tell me about {c}.", "What do you know about {c}?", "What can you tell me about {c}?",
        "Tell me something about {c}.", "Give me some facts about {c}.", "Describe {c}.", "{c}",
        "What is {c}?", "Facts about {c}, please.", "Do you know anything about {c}?",
        "I want to learn about {c}.",
    ),
}  # fmt: skip

# Phrasings of questions that only the evaluation uses, by kind of fact.
HELD_OUT: dict[str, tuple[str, ...]] = {
    "capital": ("Could you name {c}'s capital city?", "I forgot, what's the capital of {c} again?"),
    "country_of": ("{v} is which country's capital?",),
    "currency": ("Which money is used by people in {c}?",),
    "language": ("Which language would I hear in {c}?",),
    "continent": ("Can you tell me which continent {c} is part of?",),
    "population": ("About how many people call {c} their home?",),
}

FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "capital": ("And what is its capital?", "What is the capital?", "And the capital?"),
    "currency": ("And its currency?", "What currency do they use there?", "Which money is used?"),
    "language": ("What do people speak there?", "And which languages do they speak?"),
    "location": ("Where is it?", "Where is that?"),
    "continent": ("On which continent is it?", "Which continent is that?"),
    "population": ("How many people live there?", "And how many people live there?"),
    "about": ("Tell me more about it.", "Tell me more.", "What else do you know about it?"),
}

_CONTINENTS = {
    "Africa": "Algeria Angola Benin Botswana Burkina_Faso Burundi Cabo_Verde Cameroon "
    "Central_African_Republic Chad Comoros Congo DRC Djibouti Egypt Equatorial_Guinea Eritrea "
    "Eswatini Ethiopia Gabon The_Gambia Ghana Guinea Guinea-Bissau Côte_d'Ivoire Kenya Lesotho "
    "Liberia Libya Madagascar Malawi Mali Mauritania Mauritius Morocco Mozambique Namibia Niger "
    "Nigeria Rwanda Sao_Tome_and_Principe Senegal Seychelles Sierra_Leone Somalia South_Africa "
    "South_Sudan Sudan Tanzania Togo Tunisia Uganda Zambia Zimbabwe",
    "Europe": "Albania Andorra Austria Belarus Belgium Bosnia_and_Herzegovina Bulgaria Croatia "
    "Czechia Denmark Estonia Finland France Germany Greece Holy_See Hungary Iceland Ireland Italy "
    "Kosovo Latvia Liechtenstein Lithuania Luxembourg Malta Moldova Monaco Montenegro Netherlands "
    "North_Macedonia Norway Poland Portugal Romania San_Marino Serbia Slovakia Slovenia Spain "
    "Sweden Switzerland Ukraine United_Kingdom",
    "Asia": "Afghanistan Armenia Azerbaijan Bahrain Bangladesh Bhutan Brunei Burma Cambodia China "
    "Georgia India Indonesia Iran Iraq Israel Japan Jordan Kazakhstan Kuwait Kyrgyzstan Laos "
    "Lebanon Malaysia Maldives Mongolia Nepal North_Korea Oman Pakistan Philippines Qatar "
    "Saudi_Arabia Singapore South_Korea Sri_Lanka Syria Taiwan Tajikistan Thailand Timor-Leste "
    "Turkmenistan United_Arab_Emirates Uzbekistan Vietnam Yemen Hong_Kong Macau",
    "Europe and Asia": "Russia Turkey Cyprus",
    "North America": "Antigua_and_Barbuda The_Bahamas Barbados Belize Canada Costa_Rica Cuba "
    "Dominica The_Dominican El_Salvador Grenada Guatemala Haiti Honduras Jamaica Mexico Nicaragua "
    "Panama Saint_Kitts_and_Nevis Saint_Lucia Saint_Vincent_and_the_Grenadines "
    "Trinidad_and_Tobago United_States Greenland Bermuda Puerto_Rico",
    "South America": "Argentina Bolivia Brazil Chile Colombia Ecuador Guyana Paraguay Peru "
    "Suriname Uruguay Venezuela",
    "Oceania": "Australia Fiji Kiribati Marshall_Islands Nauru New_Zealand Palau Papua_New_Guinea "
    "Samoa Solomon_Islands Tonga Tuvalu Vanuatu French_Polynesia New_Caledonia Guam Cook_Islands",
}
CONTINENT = {c.replace("_", " "): k for k, v in _CONTINENTS.items() for c in v.split()}

# Official or main languages of countries whose languages are missing in the text collection.
_LANGUAGES = (
    "Australia:English;United Kingdom:English;United States:English and Spanish;Canada:English "
    "and French;India:Hindi and English;China:Mandarin Chinese;South Africa:Zulu, Xhosa, "
    "Afrikaans and English;Brazil:Portuguese;Mexico:Spanish;Argentina:Spanish;Nigeria:English, "
    "Hausa, Yoruba and Igbo;Kenya:English and Swahili;Egypt:Arabic;Pakistan:Urdu and English;"
    "Russia:Russian;Ukraine:Ukrainian;Poland:Polish;Belgium:Dutch, French and German;"
    "New Zealand:English and Maori;Ireland:English and Irish;Iran:Persian;Israel:Hebrew and "
    "Arabic;Chile:Spanish;Peru:Spanish, Quechua and Aymara;Colombia:Spanish;Cuba:Spanish;"
    "Finland:Finnish and Swedish;Indonesia:Indonesian;Philippines:Filipino and English;"
    "Ethiopia:Amharic, Oromo and Somali;Ghana:English;Morocco:Arabic and Berber;Greece:Greek;"
    "Austria:German;Hungary:Hungarian;Spain:Spanish;Singapore:English, Malay, Mandarin and Tamil;"
    "Bangladesh:Bengali;Nepal:Nepali;Sri Lanka:Sinhala and Tamil;Portugal:Portuguese;"
    "Denmark:Danish;Sweden:Swedish;Italy:Italian;Germany:German;South Korea:Korean;"
    "Saudi Arabia:Arabic;Iraq:Arabic and Kurdish;Norway:Norwegian;Switzerland:German, French, "
    "Italian and Romansh;Turkey:Turkish;Netherlands:Dutch;Thailand:Thai;Vietnam:Vietnamese;"
    "Japan:Japanese;France:French;Uganda:English and Swahili;Zambia:English;"
    "Jamaica:English;Angola:Portuguese;Botswana:English and Setswana;Benin:French;Cabo Verde:"
    "Portuguese;Djibouti:French and Arabic;Eritrea:Tigrinya, Arabic and English;The Gambia:English;"
    "Gabon:French;Guinea:French;Liberia:English;Lesotho:Sesotho and English;Madagascar:Malagasy "
    "and French;Malawi:English and Chichewa;Mali:French and Bambara;Mozambique:Portuguese;Niger:"
    "French and Hausa;Senegal:French and Wolof;Sierra Leone:English and Krio;Togo:French;Burkina "
    "Faso:French;Namibia:English and Afrikaans;Eswatini:English and Swazi;Zimbabwe:English, Shona "
    "and Ndebele;Fiji:English and Fijian;Samoa:Samoan and English;Tonga:Tongan and English;"
    "Barbados:English;The Bahamas:English;Panama:Spanish;Trinidad and Tobago:English;Papua New "
    "Guinea:Tok Pisin, English and Hiri Motu;Andorra:Catalan;Estonia:Estonian;Iceland:Icelandic;"
    "Luxembourg:Luxembourgish, French and German;Malta:Maltese and English;Slovenia:Slovenian;"
    "Guyana:English;Bhutan:Dzongkha;Maldives:Dhivehi;Bolivia:Spanish, Quechua and Aymara;"
    "Romania:Romanian;Bulgaria:Bulgarian"
)
LANGUAGES = dict(item.split(":", 1) for item in _LANGUAGES.split(";"))

_WITH_ARTICLE = (
    "United States|United Kingdom|United Arab Emirates|Netherlands|Philippines|Maldives|Comoros|"
    "Seychelles|Solomon Islands|Marshall Islands|Central African Republic|Cook Islands|"
    "Cayman Islands|Faroe Islands|Falkland Islands|British Virgin Islands|Pitcairn Islands|"
    "Northern Mariana Islands|Turks and Caicos Islands|Holy See|Isle of Man|Virgin Islands"
).split("|")
_SHOWN = {
    "DRC": "the Democratic Republic of the Congo", "Congo": "the Republic of the Congo",
    "The Dominican": "the Dominican Republic", "The Bahamas": "the Bahamas",
    "The Gambia": "the Gambia", "Holy See": "Vatican City",
}  # fmt: skip
_ALIASES = {
    "United States": ("the USA", "the US", "America", "USA", "the United States of America"),
    "United Kingdom": ("the UK", "UK", "Great Britain", "Britain"),
    "Burma": ("Myanmar",), "DRC": ("the DRC", "the Congo", "Congo-Kinshasa"),
    "Congo": ("Congo-Brazzaville",), "Côte d'Ivoire": ("Ivory Coast", "the Ivory Coast"),
    "Cabo Verde": ("Cape Verde",), "Eswatini": ("Swaziland",), "Holy See": ("the Vatican",),
    "Czechia": ("the Czech Republic",), "Timor-Leste": ("East Timor",), "Turkey": ("Turkiye",),
    "Netherlands": ("Holland", "Netherlands"), "United Arab Emirates": ("the UAE",),
    "North Macedonia": ("Macedonia",), "Bosnia and Herzegovina": ("Bosnia",),
    "Philippines": ("Philippines",), "Russia": ("the Russian Federation",),
}  # fmt: skip
_CAPITAL_FIX = {
    "Bolivia": "La Paz", "United States": "Washington, D.C.", "Australia": "Canberra",
    "New Zealand": "Wellington",
}  # fmt: skip


@dataclass
class Country:
    """A country, with its name in sentences, its other names, and its facts by kind.

    `answers` maps a kind of fact to the sentence that states it.
    """

    name: str
    shown: str
    aliases: tuple[str, ...]
    capital: str = ""
    answers: dict[str, str] = field(default_factory=dict)


def _upper(s: str) -> str:
    return s[:1].upper() + s[1:]


def _short(text: str, words: int, parts: int = 99) -> str:
    """Shorten an entry of the factbook to as many of its first clauses as fit into `words` words.

    Brackets and notes are removed.
    """
    text = re.sub(r"\s*\([^)]*\)", "", text.split("; note")[0].split(" note")[0]).rstrip(". ")
    text = text.replace("metropolitan France: ", "")
    out: list[str] = []
    for split in (r"\s*;\s*", r"\s*[;,]\s*"):
        for part in re.split(split, text):
            size = sum(len(p.split()) for p in [*out, part])
            if not part or len(out) == parts or size > words:
                break
            out.append(part)
        if out:
            break
    return ", ".join(out)


def _people(count: int) -> str:
    """Return a population as a rounded number that a small model can memorize.

    Examples are "1.4 billion" and "56 million".
    """
    if count >= 995_000_000:
        return f"{count / 1e9:.1f} billion"
    if count >= 10_000_000:
        return f"{round(count / 1e6)} million"
    if count >= 950_000:
        return f"{count / 1e6:.1f} million"
    return f"{max(round(count, -3), 1000):,}"


def _currency(text: str) -> str:
    text = re.sub(r"\s*per US dollar.*$", "", text).strip(" .-")
    text = text.replace("Cooperation Financiere en Afrique Centrale", "Central African CFA")
    text = text.replace("Communaute Financiere Africaine", "West African CFA")
    return text.split(";")[0].strip()


def _languages(text: str) -> str:
    items: list[str] = []
    for part in re.split(r"[;,]", re.sub(r"\([^)]*\)|<?[\d.]+%", "", text.split("note")[0])):
        part = part.strip(" .")
        if part and part[0].isupper() and len(part.split()) <= 3 and len(items) < 3:
            items.append(part)
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def load_countries(records: list[dict[str, Any]]) -> list[Country]:
    """Return the countries that have a capital, with their facts.

    They are read from the chat records of `world_factbook_qa`.
    """
    raw: dict[str, dict[str, str]] = {}
    for r in records:
        q, a = r["messages"][0]["content"], r["messages"][1]["content"]
        q = q.replace(r["country"], "X").replace("the X", "X")
        raw.setdefault(r["country"], {})[q] = a
    out = []
    for name, qa in raw.items():
        capital = qa.get("What is the capital of X?", "").split(" is ", 1)[-1].rstrip(". ")
        capital = _CAPITAL_FIX.get(name, capital.split("(")[0].split(";")[0].strip())
        # Leave out places without a continent, because the model needs many repetitions of each
        # fact.
        if not capital or name not in CONTINENT:
            continue
        shown = _SHOWN.get(name, f"the {name}" if name in _WITH_ARTICLE else name)
        c = Country(name, shown, _ALIASES.get(name, ()), capital)
        _fill(c, qa)
        out.append(c)
    return out


def _fill(c: Country, qa: dict[str, str]) -> None:
    top, a = _upper(c.shown), c.answers
    a["capital"] = f"The capital of {c.shown} is {c.capital}"
    a["country_of"] = f"{c.capital} is the capital of {c.shown}"
    if money := _currency(qa.get("What currency is used in X?", "").split(" is ", 1)[-1]):
        a["currency"] = f"The currency of {c.shown} is: {money}"
    tongue = LANGUAGES.get(c.name) or _languages(
        qa.get("What languages are spoken in X?", "").split(" are: ", 1)[-1]
    )
    if tongue:
        a["language"] = f"People in {c.shown} speak {tongue}"
    where = qa.get("Where is X?", "").split(" is located in ", 1)[-1]
    where = _short(where, 16, 3)
    if where and c.name != "The Bahamas":
        where = re.sub(r"^(Caribbean|Middle East)", r"the \1", where)
        a["location"] = f"{top} is in {where if where[:4] == 'the ' else _upper(where)}"
    if c.name in CONTINENT:
        a["continent"] = f"{top} is in {CONTINENT[c.name]}"
    if number := re.search(r"About ([\d,]+) people", qa.get("How many people live in X?", "")):
        people = _people(int(number[1].replace(",", "")))
        a["population"] = f"About {people} people live in {c.shown}"
    a.update({k: v.rstrip(".") + "." for k, v in a.items()})
    a["about"] = " ".join(
        a[k] for k in ("location", "capital", "language", "population") if k in a
    )  # fmt: skip
