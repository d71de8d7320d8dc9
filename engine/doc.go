// Package engine is a reference engine: a small stand-in for an LLM inference engine's encoder side, for trying, testing and
// benchmarking without a GPU.
//
// It is honest about what it is. It decodes real images and sizes them as Qwen2-VL's processor does (patches of 14 x 14 pixels,
// merged 2 x 2), but its weights are dummies: one matrix of seeded pseudo-random numbers that turns the pixels of each merged patch
// into a row of the encoding. It generates no text. What it shows is real all the same: encodings of real sizes, encoded once,
// written straight into the node's pool, announced, pulled and mapped through the node's engine API, in a step loop like an engine's.
//
// It speaks OpenAI's chat completions with ec_transfer_params in and out, and says in a `ferry` object of its answer what was
// embedded and where the bytes came from. It never fetches media: images come as data: URLs, or as file: URLs from a directory
// that the operator allowed.
package engine
