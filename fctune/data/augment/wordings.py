"""Answers that call nothing: a refusal that names the missing ability, and a question for a missing value.

One wording teaches a model to refuse in that wording whatever looks unfamiliar, so there are dozens of different
structure, and each says what is missing. They are filled from the tools' own descriptions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from fctune.data.augment.spoken import join_words, list_properties, say_name, say_value, split_words
from fctune.data.conversation import Tool

MAX_WORDS = 14
"""Words of a description's sentence that fit into another one."""
_MAX_LIST = 24  # words of the abilities that an answer enumerates; of more, it names the topics

# The verbs that tools' descriptions and names begin with.
_VERB_TEXT = """
    accept access activate add adjust aggregate allocate analyse analyze apply approve archive arrange assess assign
    attach authenticate backup block book broadcast browse build buy calculate call cancel change check choose classify
    clean clear close combine compare compile compose compress compute configure confirm connect control convert copy
    count create crop cut decode decrypt define delete deliver deploy design detect determine diagnose disable discover
    display divide download draft draw edit enable encode encrypt enter estimate evaluate examine execute expand explain
    explore export extract fetch fill filter find fix follow forecast format forward generate get give group handle
    identify implement import improve initiate insert inspect install interpret inquire investigate invite issue join
    keep launch list load locate lock log look make manage map mark match measure merge modify monitor mount move
    multiply navigate notify obtain open optimize order organize parse pause pay perform place plan play post predict
    prepare preview print process produce provide publish purchase query rank rate read rebook receive recognize
    recommend record redeem reduce refresh register reject release remind remove rename render renew rent repeat replace
    reply report request reschedule reserve reset resize resolve restart restore resume retrieve return review rotate
    route run save scan schedule search segment select send set share shop show simulate skip solve sort split start
    stop store stream submit subscribe subtract suggest summarise summarize switch sync take test tokenize trace track
    train transcribe transfer transform translate trigger turn unlock unsubscribe update upgrade upload validate verify
    view visualize vote watch withdraw write"""
_VERBS = frozenset(_VERB_TEXT.split())
_PREFIX = re.compile(
    r"^(?:(?:this|the|an?)\s+)?(?:(?:function|tool|api|endpoint|method|service|command)\b\s*)?(?:(?:that|which)\s+)?"
    r"(?:(?:is|can be)\s+)?(?:(?:used|designed|able)\s+(?:to|for)\s+|use (?:this|it)(?: \w+)? to\s+|"
    r"allows?(?: you| users?)? to\s+|"
    r"lets?(?: you| users?)?\s+|helps?(?: you| users?)?(?: to)?\s+|can\s+|will\s+|to\s+)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.;!?:](?:\s|$)|\n|\s[-–—]\s|\s\(|, (?:such as|including|e\.g\.)")
_CLAUSE = re.compile(
    r"\s(?:which|that|by|using|based|given|including|along|together|depending|according|so)\b.*|,.*", re.DOTALL
)


class Ability(NamedTuple):
    """Phrases for what a tool does, which fill the gaps of wordings.

    Attributes:
        do: A phrase that follows "I can": ``get the weather of a city``; None if neither the description nor the name
            begins with a verb.
        topic: A phrase that follows "a tool for": ``weather of a city``.
    """

    do: str | None
    topic: str


def describe_ability(tool: Tool) -> Ability:
    """Return what a tool does, from its description, or else from its name."""
    description = tool.function.get("description")
    text = " ".join(description.split()) if isinstance(description, str) else ""
    phrase = _shorten(lower_first(_PREFIX.sub("", first_sentence(text), count=1).strip()))
    do = _to_infinitive(phrase)
    name = split_words(tool.name)
    if do is None and len(name) > 1 and _find_verb(name[0]) is not None:
        do = " ".join([_find_verb(name[0]) or "", *name[1:]])
    is_verb_first = len(name) > 1 and _find_verb(name[0]) is not None
    return Ability(do, " ".join(name[1:] if is_verb_first else name) or tool.name)


def _shorten(phrase: str) -> str:
    if len(phrase.split()) <= MAX_WORDS:
        return phrase
    shorter = _CLAUSE.sub("", phrase)
    return shorter if 3 <= len(shorter.split()) <= MAX_WORDS else ""


def _to_infinitive(phrase: str) -> str | None:
    first, _, rest = phrase.partition(" ")
    verb = _find_verb(first.lower())
    return f"{verb} {rest}" if verb is not None and rest else None


def _find_verb(word: str) -> str | None:
    """Return the verb that a word is, in its base form or with the s of the third person."""
    for base in (word, word.removesuffix("s"), word.removesuffix("es"), f"{word.removesuffix('ies')}y"):
        if base in _VERBS:
            return base
    return None


def first_sentence(text: str) -> str:
    """Return what a description says before its first stop, bracket or list of examples."""
    return _SENTENCE_END.split(text, maxsplit=1)[0].strip()


def upper_first(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    """Return a text with a small first letter, unless it begins with an abbreviation."""
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


# "{do}" is a phrase such as "get the weather of a city".
_DECLINES = (
    "I can't {do}: none of the available functions does that.",
    "None of the tools I have here can {do}.",
    "There is no function on offer to {do}, so I can't help with this one.",
    "To answer this, I would need a tool to {do}, and I don't have one.",
    "Sorry, I have no way to {do} with the functions I was given.",
    "That would take a function to {do}. The ones I have do other things.",
    "I'd need to be able to {do} for that, which my tools don't cover.",
    "Nothing among my tools lets me {do}.",
    "I'm not able to {do} here. If you can give me a tool for it, I'll use it.",
    "Unfortunately, I can't {do} with what is available to me.",
    "The functions that I can call don't include one to {do}.",
    "What's missing is a tool to {do}; without it I can't complete this request.",
    "I looked through the available functions, but none of them lets me {do}.",
    "Your request needs a function to {do}. I have no such function.",
    "I have nothing to {do} with, and I'd rather not guess.",
    "No suitable function here: I would have to {do}, and nothing does that.",
    "This isn't possible with my current tools, because I can't {do}.",
    "I don't have access to anything that could {do}.",
    "A tool to {do} would be required for this, but it isn't among those I have.",
    "I can't do this one. My functions don't let me {do}.",
    "Without a way to {do}, I can't give you an answer to that.",
    "Is there another tool that you can give me? I have none to {do}.",
    "Could you make a function available to {do}? At the moment there is none.",
    "I'm missing the right tool for this, something to {do}.",
    "Right now I can't {do}. Let me know if a function for it becomes available.",
    "As things stand, I'm unable to {do}; the tools at hand serve other purposes.",
    "For this I'd have to {do}, and no function here does so.",
    "I'm afraid there is nothing among my tools to {do}.",
    "Calling one of these functions wouldn't help, since none can {do}.",
    "I understand what you're asking for, but I can't {do} with these functions.",
    "That's outside of what I can do at the moment: I have no function to {do}.",
    "If I had a function to {do}, I could help. I don't, unfortunately.",
    "You're asking me to {do}. None of my tools is made for that.",
    "My tools don't let me {do}, so you would need another way to get this done.",
    "I won't call a function for this, because the ones available can't {do}.",
    "It seems that the tool to {do} hasn't been provided.",
)
# Also with "{offer}", what one of the tools on offer does.
_DECLINES_WITH_OFFER = (
    "I can {offer}, but I can't {do}.",
    "My tools let me {offer}. They don't let me {do}.",
    "The functions here are for other things, for instance to {offer}; none of them can {do}.",
    "I could {offer} for you, but there is no function to {do}.",
    "There is a tool to {offer}, but none to {do}, which this request needs.",
    "What I have is a way to {offer}, not one to {do}.",
)
# "{topic}" is a phrase such as "currency exchange rates".
_DECLINES_BY_TOPIC = (
    "I have no tool for this ({topic}).",
    "None of the available functions covers {topic}.",
    "There's no function here for {topic}, so I can't answer this.",
    "This needs a tool for {topic}, and I wasn't given one.",
    "Sorry, {topic} is not something that my functions can handle.",
    "I can't help with {topic}: the functions I have are for other things.",
    "Your question is about {topic}, which none of my tools deals with.",
    "What I'd need is a function for {topic}. It isn't among the available ones.",
    "No function that I can call has to do with {topic}.",
    "I'd have to guess, since there is no tool for {topic} here.",
    "For {topic}, I would need another tool than those I have.",
    "Could you provide a function for {topic}? I can't do this without it.",
    "Unfortunately, my tools don't include one for {topic}.",
    "I'm not able to do this. A tool for {topic} is missing.",
)
# Without knowledge of what is missing.
_DECLINES_PLAIN = (
    "None of the available functions can do what you're asking for.",
    "I don't have a tool for this request.",
    "The functions I was given don't fit this question, so I can't answer it with them.",
    "Sorry, that's not something I can do with these tools.",
    "There is no function here that would answer this.",
    "I can't help with that one: my functions are for other things.",
    "No tool on offer matches your request. Can you give me one that does?",
    "I'd need a different function for that.",
    "That's beyond the tools that I have at the moment.",
    "I looked at the functions available to me, and none is right for this.",
    "Your request doesn't match any of my tools, and I'd rather not guess.",
    "Unfortunately, calling any of these functions wouldn't get you what you want.",
)
_DECLINES_PLAIN_WITH_OFFER = (
    "I can {offer}, but that isn't what you're asking for.",
    "My tools let me {offer}; they can't do what you need.",
    "The functions here are for other things, for instance to {offer}.",
    "I could {offer} for you, but I have no function for this request.",
    "All I have are functions to {offer} and the like, which don't help here.",
)
_CLOSERS = (
    *("", "", "", "", "", "", ""),
    " Is there anything else I can do for you?",
    " You may want to look it up elsewhere.",
    " Let me know if I can help in another way.",
    " If you have another source for this, I'm happy to work with it.",
)

# "{param}" is a phrase such as "start date"; "{do}" as above.
_QUESTIONS = (
    "Which {param} should I use?",
    "Could you tell me the {param}?",
    "What {param} would you like?",
    "Sure. What is the {param}?",
    "The {param} is missing. What should it be?",
    "You haven't mentioned the {param}. Could you add it?",
    "One detail is missing: the {param}.",
    "Before I can go ahead, I need the {param}.",
    "I can do that, but I need one more thing, the {param}.",
    "Let me know the {param}, and I'll take care of it.",
    "May I ask for the {param}?",
    "No {param} was given. Which one do you have in mind?",
    "Can you specify the {param}, please?",
    "Please tell me the {param}.",
    "I don't know the {param} yet. What should I enter?",
    "Your request doesn't say which {param}. Which is it?",
    "Happy to help! Which {param} do you mean?",
    "I'd have to guess the {param}, so please tell me.",
)
_QUESTIONS_WITH_ABILITY = (
    "I need the {param} before I can {do}.",
    "Please give me the {param}, and I'll {do}.",
    "To {do}, I need to know the {param}.",
    "I can {do} once I know the {param}.",
    "In order to {do}, I still need the {param}. What is it?",
    "I'd like to {do} for you, but the {param} is missing.",
)
# "{what}" is a parameter's description with its article, such as "the city to look at".
_QUESTIONS_BY_DESCRIPTION = (
    "Could you tell me {what}?",
    "I still need {what}.",
    "What's missing is {what}.",
    "Please give me {what}.",
    "One thing first: I need to know {what}.",
    "I can't go on without {what}. Can you add it?",
)
_REPLIES = (
    "{value}",
    "{value}.",
    "{value}, please.",
    "It's {value}.",
    "Use {value}.",
    "Oh, sorry: {value}",
    "The {param} is {value}.",
    "Take {value} as the {param}.",
    "I meant {value}.",
    "Please take {value}.",
)


def word_refusal(offered: Sequence[Tool], missing: Sequence[Tool], rng: random.Random) -> str:
    """Return the answer to a request for which the tools on offer are not enough; it names what is missing.

    Args:
        offered: The tools on offer.
        missing: The tools that the request needs; empty if they are not known.
        rng: Random generator.
    """
    abilities = [describe_ability(tool) for tool in missing]
    does = [one.do for one in abilities if one.do is not None]
    offers = [one.do for one in map(describe_ability, offered) if one.do is not None]
    offer = rng.choice(offers) if offers and rng.random() < 0.25 else None
    templates: tuple[str, ...]
    if not abilities:
        templates = _DECLINES_PLAIN if offer is None else _DECLINES_PLAIN_WITH_OFFER
    elif len(does) < len(abilities) or sum(len(one.split()) for one in does) > _MAX_LIST or rng.random() < 0.15:
        templates = _DECLINES_BY_TOPIC
    else:
        templates = _DECLINES if offer is None else _DECLINES_WITH_OFFER
    topic = join_words([one.topic for one in abilities] or [""], "or")
    text = rng.choice(templates).format(do=join_words(does or [""], "or"), topic=topic, offer=offer)
    return text + rng.choice(_CLOSERS)


def word_question(tool: Tool, parameter: str, rng: random.Random) -> str:
    """Return the question for a required value that the request lacks.

    It names the tool's parameter, or says what its description does.
    """
    description = list_properties(tool).get(parameter, {}).get("description")
    what = first_sentence(description) if isinstance(description, str) else ""
    do = describe_ability(tool).do
    is_phrase = what.lower().startswith(("the ", "a ", "an ", "your ")) and len(what.split()) <= MAX_WORDS
    if is_phrase and rng.random() < 0.3:
        return rng.choice(_QUESTIONS_BY_DESCRIPTION).format(what=lower_first(what))
    templates = _QUESTIONS_WITH_ABILITY if do is not None and rng.random() < 0.3 else _QUESTIONS
    return rng.choice(templates).format(param=say_name(parameter), do=do)


def word_reply(parameter: str, value: object, rng: random.Random) -> str:
    """Return what the user replies to a question for a value."""
    return rng.choice(_REPLIES).format(param=say_name(parameter), value=say_value(value))
