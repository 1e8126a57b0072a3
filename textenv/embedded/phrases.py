"""Words and sentence patterns of the review grammar: data only; `grammar.py` samples and recognizes them.

A pattern is text with ``{slots}``; each slot is replaced by one of its phrases. Sampler and recognizer read the
same tables, so they cannot disagree. No word that carries sentiment occurs in both sentiments (there is no
"never dull"), so the small embedded models learn the grammar in seconds.
"""

OPENINGS = ("{the} {genre} {topic}", "{the} {kind} {genre} {topic}", "{whose} {number} {genre}")
"""First words of a review, neutral in sentiment. No opening is the beginning of another."""

PREDICATES = (
    "{was} {description}",
    "{was} {description} from start to finish",
    "made {audience} {reaction} and {second_reaction}",
)
"""Continuations of the first sentence after the opening."""

SENTENCES = (
    "{part} {was} {description}",
    "{parts} {were} {description}",
    "every {moment} {works} and {part} {was} {description}",
    "i {felt} every {moment}",
    "i would {gladly} {see} it again",
    "my {friends} {felt} it and so did i",
    "{advice} it {soon}",
)
"""Sentences that may follow the first."""

FURTHER = (0, 1, 1, 1, 2, 2, 2)
"""Numbers of sentences after the first; each entry is equally likely."""

NEUTRAL: dict[str, tuple[str, ...]] = {
    "the": ("the", "this"),
    "kind": ("new", "short", "quiet", "french", "recent"),
    "genre": ("film", "movie", "comedy", "drama", "thriller", "western"),
    "topic": (
        "about two sisters",
        "about an old house",
        "about a lost dog",
        "by a young director",
        "from last year",
        "set in paris",
    ),
    "whose": ("his", "her"),
    "number": ("first", "second", "third", "latest"),
    "was": ("was", "is"),
    "were": ("are", "were"),
    "adverb": ("truly", "really", "simply"),
    "degree": ("real", "total", "true"),
    "parts": ("the actors", "the leads", "the songs", "the jokes"),
    "part": ("the plot", "the music", "the ending", "the dialogue"),
    "moment": ("scene", "line", "twist", "song"),
    "audience": ("me", "my family", "everyone"),
    "friends": ("friends", "family", "parents"),
    "see": ("watch", "see", "recommend"),
    "soon": ("tonight", "this weekend", "while you can"),
}
"""Slots with the same phrases for both sentiments."""

_STRONG = (("awful", "dreadful", "boring", "clumsy"), ("superb", "brilliant", "charming", "gripping"))
_PLAIN = (("dull", "stale", "lazy", "cold"), ("fresh", "witty", "warm", "funny"))
_DESCRIPTION = ("{adjective}", "{adverb} {adjective}", "{strong} and {plain}", "a {degree} {thing}")

POLAR: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "description": (_DESCRIPTION, _DESCRIPTION),
    "adjective": (_STRONG[0] + _PLAIN[0], _STRONG[1] + _PLAIN[1]),
    "strong": _STRONG,
    "plain": _PLAIN,
    "thing": (("mess", "bore", "failure"), ("joy", "triumph", "treat")),
    "reaction": (("yawn", "groan", "sigh"), ("laugh", "smile", "cheer")),
    "second_reaction": (("leave", "weep", "snore"), ("clap", "sing", "dance")),
    "works": (("drags", "fails", "annoys"), ("shines", "works", "sparkles")),
    "felt": (("hated", "endured", "disliked"), ("loved", "adored", "enjoyed")),
    "gladly": (("never", "hardly", "not"), ("gladly", "happily", "surely")),
    "advice": (("skip", "avoid", "forget"), ("catch", "try", "share")),
}
"""Slots that carry the sentiment: (negative phrases, positive phrases)."""
