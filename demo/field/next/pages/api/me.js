import { field } from '../../lib/settings';

export default function me(request, response) {
  response.send(`logged in as ${field().sessions.get(request.cookies.session) || 'nobody'}`);
}
