from sbkit.base.user_folders import cache_folder as default_cache


def caches():
    return [default_cache()]


def find_kept(name):
    return None


def keep(*a, **k):
    raise NotImplementedError
