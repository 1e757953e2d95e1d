"""The stock model: weights, state, order of operations, sharding; arithmetic is behind the doors of ops/ (floor 4)."""
