// Render Modelfile templates as Ollama does: Go's own text/template, on values that print themselves as compact JSON.
// Reads a list of {"source", "data"} from standard input, and writes a list of {"text", "mark"}.
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"text/template"
	"text/template/parse"
)

type object struct{ json.RawMessage }

func (o *object) String() string {
	text, err := json.Marshal(o)
	check(err)
	return string(text)
}

type tool struct {
	Type     string `json:"type"`
	Function object `json:"function"`
}

func (t tool) String() string {
	text, err := json.Marshal(t)
	check(err)
	return string(text)
}

type message struct {
	Role      string
	Content   string
	ToolCalls []struct {
		Function struct {
			Name      string
			Arguments object
		}
	}
}

type request struct {
	Source string
	Data   struct {
		System   string
		Tools    []tool
		Messages []*message
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// findMark returns the text at the beginning of the branch that is taken if a message has calls.
func findMark(node parse.Node, isInside bool) string {
	switch n := node.(type) {
	case *parse.ListNode:
		if n == nil || len(n.Nodes) == 0 {
			return ""
		}
		if isInside {
			return findMark(n.Nodes[0], true)
		}
		for _, child := range n.Nodes {
			if mark := findMark(child, false); mark != "" {
				return mark
			}
		}
	case *parse.IfNode:
		isInside = isInside || strings.Contains(n.Pipe.String(), ".ToolCalls")
		if mark := findMark(n.List, isInside); mark != "" || isInside {
			return mark
		}
		return findMark(n.ElseList, false)
	case *parse.RangeNode:
		return findMark(n.List, isInside)
	case *parse.TextNode:
		if isInside {
			return string(n.Text)
		}
	}
	return ""
}

func main() {
	var requests []request
	check(json.NewDecoder(os.Stdin).Decode(&requests))
	var answers []map[string]string
	for _, r := range requests {
		parsed, err := template.New("").Option("missingkey=zero").Parse(r.Source)
		check(err)
		var text bytes.Buffer
		data := map[string]any{"System": r.Data.System, "Tools": r.Data.Tools, "Messages": r.Data.Messages}
		check(parsed.Execute(&text, data))
		answers = append(answers, map[string]string{"text": text.String(), "mark": findMark(parsed.Tree.Root, false)})
	}
	check(json.NewEncoder(os.Stdout).Encode(answers))
}
