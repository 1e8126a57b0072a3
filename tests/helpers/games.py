"""Games played by a player or by given texts."""


def play(env, player, **reset):
    """Return, number of the player's turns."""
    conversation, total, ended = [env.reset(**reset)[0]], 0.0, False
    while not ended:
        said = player(conversation)
        reply, reward, terminated, truncated, _ = env.step(said)
        assert env.action_space.contains(said) and env.observation_space.contains(reply) and not truncated
        conversation += [said, reply]
        total, ended = total + reward, terminated
    return total, len(conversation) // 2


def replies(env, *texts):
    """What a game answers to texts said one after the other: (reply, reward, terminated) each."""
    return [env.step(text)[:3] for text in texts]
