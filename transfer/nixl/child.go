package nixl

import (
	"context"
	"errors"
	"log/slog"
)

type hello struct {
	Library string
	Engine  engineOptions
}
type childOptions struct {
	command []string
	role    role
	hello   hello
	log     *slog.Logger
}
type child struct {
	agent
	facts facts
}

func startChild(context.Context, childOptions, func([]byte)) (*child, error) {
	return nil, errors.New("not yet")
}
