"""FLOPs of the reflections, so that the reported MFU counts them."""

from path_backend.eager.attention import CHUNK


def transform_flops_per_token(n_heads: int, n_kv_heads: int, head_dim: int, seq_len: int) -> int:
    """FLOPs per token and layer that the reflections add to attention, forward and backward.

    As in torchtitan, a multiply-add is two FLOPs, the backward is two forwards, triangles count as
    squares, and recomputation does not count. Forward, with C tokens a chunk and D = head_dim:

        query head      Q W^T, (low X^T) W          4 C D
                        low X^T, its product with up^T      4 C^2
                        one P per level, half of the tokens     D^2 levels
        key/value head  W W^T, K W^T, (up X) W, X W     8 C D
                        up X                        2 C^2
                        W^T (X W)                   2 D^2
                        one P per level, half of the tokens     D^2 levels
                        P P per block of each level     2 D^3 / C (1 - 2^-levels)

    The triangular solve for X, C^2 / 3, is left out.
    """
    C, D = CHUNK, head_dim
    chunks = -(-seq_len // C)
    levels = (chunks - 1).bit_length()
    query_head = 4 * C * D + 4 * C**2 + D**2 * levels
    products = 2 * D**3 * (2**levels - 1) // (C * 2**levels)
    key_head = 8 * C * D + 2 * C**2 + 2 * D**2 + D**2 * levels + products
    return 3 * (n_heads * query_head + n_kv_heads * key_head)
